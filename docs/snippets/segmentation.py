import mcbn
from trained import shapes

net, train_loader, images, labels = shapes()  # your trained network: logits (N, K, H, W)

bayes = mcbn.MCBN(net, "classification").fit(train_loader, n_samples=50)
pred = bayes.predict(images)

wrong = pred.label != labels
print("probabilities", tuple(pred.probs.shape), "entropy", tuple(pred.entropy.shape))
print(f"mean entropy of wrong pixels {pred.entropy[wrong].mean():.2f}")
print(f"mean entropy of right pixels {pred.entropy[~wrong].mean():.2f}")
print(f"AUROC of the entropy for wrong pixels: {mcbn.metrics.auroc(pred.entropy, wrong):.2f}")
